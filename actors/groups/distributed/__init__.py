"""Collectives over torch.distributed: NCCL between GPUs, gloo between CPUs of any hosts."""
