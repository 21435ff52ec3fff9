#!/bin/bash
# build_guest.sh OUT: make the guest of power_cuts.py in a directory: vmlinuz, initrd.gz, and system.img, a read-only ext4
# with Python and kvstore. Needs, as root: apt-get install qemu-system-x86 busybox-static xfsprogs btrfs-progs cpio kmod
set -euo pipefail
tree=$(cd "$(dirname "$0")/../.." && pwd) out=${1:?output directory}
site=$("$tree/.venv/bin/python" -c 'import numpy, os; print(os.path.dirname(os.path.dirname(numpy.__file__)))')
py=$("$tree/.venv/bin/python" -c 'import sys; print(sys.base_prefix)')
mkdir -p "$out"; cd "$out"; out=$PWD kernel=$PWD/kernel
if [[ ! -d $kernel ]]; then
    package=$(apt-cache depends linux-image-cloud-amd64 | sed -n 's/ *Depends: \(linux-image-[^ ]*\)/\1/p')
    apt-get download "$package"
    dpkg-deb -x "$package"_*.deb kernel
fi
cp "$kernel"/boot/vmlinuz-* vmlinuz
rm -rf initrd sys; mkdir -p initrd/{bin,lib,proc,sys,dev,data,system} sys
cp /usr/bin/busybox initrd/bin/; for a in sh mount insmod switch_root; do ln -sf busybox initrd/bin/$a; done
mods=$(ls "$kernel"/lib/modules/)
: >initrd/modules
add() { for d in $(grep -E "/$1\.ko:" "$kernel/lib/modules/$mods/modules.dep" | tr -d ':' | awk '{for(i=NF;i>0;i--)print $i}'); do
  b=$(basename $d); [[ -e initrd/lib/$b ]] || { cp "$kernel/lib/modules/$mods/$d" initrd/lib/; echo "$b" >>initrd/modules; }; done; }
[[ -e $kernel/lib/modules/$mods/modules.dep ]] || depmod -b "$kernel" "$mods"
for m in virtio_pci virtio_blk ext4 xfs btrfs crc32c_generic libcrc32c xxhash_generic; do add $m; done
cat >initrd/init <<'INIT'
#!/bin/sh
mount -t proc p /proc; mount -t sysfs s /sys; mount -t devtmpfs d /dev
while read m; do insmod /lib/$m; done </modules
mount -t ext4 -o ro /dev/vda /system || echo "no system"
FS=$(busybox sed 's/.*kvfs=\([a-z0-9]*\).*/\1/' /proc/cmdline)
mount -t $FS /dev/vdb /system/data || { echo "GUEST cannot mount"; busybox poweroff -f; }
mount -t proc p /system/proc; mount -t devtmpfs d /system/dev; mount -t tmpfs t /system/tmp; mount -t sysfs s /system/sys
busybox ip link set lo up
exec busybox chroot /system /bin/start
INIT
chmod +x initrd/init; (cd initrd; find . | cpio -o -H newc --quiet | gzip -1 >../initrd.gz)
mkdir -p sys/{bin,data,proc,dev,tmp,sys,k} sys"$py"/{bin,lib}
cp /usr/bin/busybox sys/bin/; ln -s busybox sys/bin/sh
cp "$py"/bin/python3.11 sys"$py"/bin/; cp "$py"/lib/libpython3.11.so.1.0 sys"$py"/lib/
tar -C "$py/lib" -c --exclude={site-packages,test,idlelib,ensurepip,config-*,lib2to3,turtledemo,tkinter,pydoc_data} \
    python3.11 | tar -C "sys$py/lib" -x
mkdir sys"$py"/lib/python3.11/site-packages
for p in numpy numpy.libs msgspec xxhash; do [[ -e $site/$p ]] && cp -r "$site/$p" sys"$py"/lib/python3.11/site-packages/; done
rm -rf sys"$py"/lib/python3.11/site-packages/numpy/{tests,*/tests,f2py,distutils}
cp -r "$tree"/kvstore sys/k/; mkdir -p sys/k/tests/{torture,campaign}; cp "$tree"/tests/torture/blocks.py sys/k/tests/torture/; cp "$tree"/tests/campaign/power_guest.py sys/k/tests/campaign/
find sys -name '*.so*' -o -name python3.11 -type f -path '*bin*' | xargs ldd 2>/dev/null | grep -o '/[^ ]*' | sort -u | while read l; do [[ -f $l && $l != $out/* ]] && { mkdir -p sys$(dirname $l); cp -Ln $l sys$l; }; done || true
printf '#!/bin/sh\nexport PYTHONPATH=/k PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 HOME=/tmp\ncd /k; %s/bin/python3.11 -m tests.campaign.power_guest\nbusybox poweroff -f\n' "$py" >sys/bin/start; chmod +x sys/bin/start
rm -f system.img; mkfs.ext4 -q -F -d sys system.img 400M
