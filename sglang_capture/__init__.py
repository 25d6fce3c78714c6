"""sglang-capture: hidden states out of a stock SGLang server, for training draft models."""
