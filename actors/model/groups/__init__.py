"""The backends of `actors.model.group.Group`: one rank, threads, shared memory, and torch.distributed (gloo, NCCL)."""
