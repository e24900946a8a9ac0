"""Where the time went: recorded spans, their clocks, and what can be read from them. No torch."""
