"""The attention interface, and the computations that all devices share: merging, softcaps, sinks."""
