"""Kernels for a mixture-of-experts layer around the grouped GEMMs."""
