#!/bin/sh
# Makes the secrets of common.yaml in DIRECTORY and applies them. Run it again within 90 days, the life of Valkey's
# certificate, to renew that, passwords and the peers' secret; neither engines nor Valkey restart. The keyring and the
# authority stay.
#
#   deploy/kubernetes/secrets.sh DIRECTORY [option of kubectl, such as --namespace=llm]...
#
# DIRECTORY also has what no pod needs: the authority's key and the administrator's password. Needs OpenSSL 3.
set -eu
umask 077
mkdir -p "${1:?Give a directory for the secrets.}/vllm-kvstore" "$1/valkey"
cd "$1"
shift

digest() {
    tr -d '\n' | openssl dgst -sha256 -r | cut -c -64
}

# Prints the line of a user with a new password. The one before stays valid until the next run, because Kubernetes
# updates the files of each pod at its own time. After runs that failed, the last one applied for certain does, too.
touch applied.acl valkey/users.acl
user() {
    before=$(sed -n "s/^user $1 on \(#[0-9a-f]*\) .*/\1/p" applied.acl valkey/users.acl | sort -u | tr '\n' ' ')
    openssl rand -hex 32 > "$2"
    echo "user $1 on #$(digest < "$2") $before$3"
}

users=$(
    echo "user default off"
    user kv vllm-kvstore/valkey-password "~kv:* resetchannels -@all +hello +get +set +exists +unlink +expire +info"
    user kvadmin admin-password "~kv:* resetchannels -@all +hello +scan +pttl +object|idletime +strlen +getrange +get +exists +unlink +client|no-touch"
    user reload valkey/reload-password "resetkeys resetchannels -@all +acl|load"
)
echo "$users" > valkey/users.acl

test -s vllm-kvstore/keyring.json ||
    printf '{"current": 1, "keys": {"1": "%s"}}\n' "$(openssl rand -base64 32)" > vllm-kvstore/keyring.json
openssl rand -hex 32 > vllm-kvstore/peer-secret

certificate() {
    openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -noenc "$@" 2> openssl.log || {
        cat openssl.log >&2
        exit 1
    }
}
test -s ca.key || certificate -days 3650 -subj /CN=kvstore -keyout ca.key -out ca.crt
certificate -days 90 -subj /CN=valkey -addext subjectAltName=DNS:valkey,DNS:localhost -addext basicConstraints=CA:FALSE \
    -CA ca.crt -CAkey ca.key -keyout valkey/tls.key -out valkey/tls.crt
cp ca.crt vllm-kvstore/ca.crt
cp ca.crt valkey/ca.crt

# Valkey first: it accepts the passwords before as well.
for name in valkey vllm-kvstore; do
    kubectl create secret generic "$name" --from-file="$name" --dry-run=client --output=yaml "$@" |
        kubectl apply --filename=- "$@"
done
cp valkey/users.acl applied.acl
