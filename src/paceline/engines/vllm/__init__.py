"""The vLLM plugin: a cap inside vLLM's routers, its control and its metrics (docs/vllm.md)."""
