"""Normalization for JAX: accurate, synchronised across devices, drop-in for Flax."""
