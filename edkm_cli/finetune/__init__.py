"""A compressed model goes on training: `edkm finetune` (an adapter, or tables), `edkm distill` (tables), `edkm merge`."""
