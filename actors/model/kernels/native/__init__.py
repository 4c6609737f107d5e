"""Kernels in C++ for CPUs, compiled on the machine that runs them."""
