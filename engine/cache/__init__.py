"""KV cache bookkeeping: which blocks exist, who reads them, which may be found again. No tensors."""
