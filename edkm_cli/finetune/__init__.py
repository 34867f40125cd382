"""LoRA on a compressed model: `edkm finetune` trains an adapter, `edkm merge` makes it part of the tables and indices."""
