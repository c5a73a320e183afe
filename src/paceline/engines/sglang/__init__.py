"""Token Drop inside SGLang, as a plugin that its processes load."""
