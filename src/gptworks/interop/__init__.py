"""Foreign commands and configurations, translated into ours at the edge. One module per system; nothing else knows
their words."""
