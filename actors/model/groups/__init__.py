"""The backends of `actors.groups.group.Group`: one rank, threads, shared memory, and torch.distributed (gloo, NCCL)."""
