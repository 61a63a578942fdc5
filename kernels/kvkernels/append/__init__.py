"""New tokens into the cache: offset, transform, clip, quantize and pack in one step; only for the GPU so far."""
