"""Records: header, checksums, and verification on every read."""

from kvstore.codec.record import RecordCodec, RecordFault, RecordHeader, decode_header

__all__ = ["RecordCodec", "RecordFault", "RecordHeader", "decode_header"]
