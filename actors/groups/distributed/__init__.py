"""Collectives over torch.distributed: NCCL between GPUs, gloo between hosts."""
