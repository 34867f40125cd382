"""What computes from packed weights: the modules of a compressed model, the operators they call, and their kernels.

`palettized.py`, `embeddings.py` and `experts.py` hold the modules, `lut_linear.py` the operators, `dispatch.py` says which
path runs when. A kernel's file is named `<algorithm>_<backend>`: `torch` is the reference, the others are tested against
it. Kernels of training are in edkm_cli/kernels.
"""
