"""systemd: units for a coordinator and for nodes, which come back after a crash or a reboot."""
