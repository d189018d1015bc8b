"""The Triton kernels and their launchers, one operation a file. Imported only when a buffer lies on a device."""
