"""Units as systemd itself judges them."""
