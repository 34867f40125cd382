"""edkm: train-time 3-bit palettization of LLaMA-family models (package `edkm_cli`)."""
