"""kvkernels: quantize, pack and attend. Tensors in, tensors out; nothing here knows about files."""
