"""A process that writes and reads blocks in a directory others use too.

usage: ``python -m tests.support.kv.tier_writer DIR LIMIT BLOCKS``
"""

from __future__ import annotations

import sys
from pathlib import Path

from actors.kv_offload.block_part import BlockPart, KVFormat
from actors.kv_offload.directory import DirectoryTier

WHOLE = BlockPart(range(4), range(3), range(16))
KV_FORMAT = KVFormat("a" * 64, "float32", 2, 8, 16)
PAYLOAD = bytes(range(256)) * (KV_FORMAT.num_bytes(WHOLE) // 256)


def main(directory: Path, limit_bytes: int, blocks: int) -> int:
    """Store and read every block twice; 1 where one is not what was stored."""
    tier = DirectoryTier(directory, limit_bytes)
    for number in [*range(blocks), *range(blocks)]:
        name = KV_FORMAT.name(number.to_bytes(32, "little"))
        tier.store(name, WHOLE, PAYLOAD)
        if tier.load(name, WHOLE) not in (PAYLOAD, None) or tier.num_damaged:
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
