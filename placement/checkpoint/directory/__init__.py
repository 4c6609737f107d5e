"""The parts that all checkpoint formats share: typed header fields and a directory of tensors."""
