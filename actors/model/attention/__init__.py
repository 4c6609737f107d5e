"""The attention interface, and the maths that every device shares: merging, softcaps, sinks."""
