"""KV blocks that outlive the device: in host memory, on a disk, in a directory that replicas share."""
