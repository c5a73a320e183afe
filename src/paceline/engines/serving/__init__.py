"""Parts that engines which serve models share: settings, caps of layers and models, counters."""
