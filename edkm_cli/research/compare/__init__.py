"""`edkm compare`: one model, many methods, one evaluator."""
