"""Kernels of a mixture-of-experts layer around its grouped GEMMs."""
