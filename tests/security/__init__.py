"""Who may join and whom to trust; and that whatever bytes come, they are data, and never too many."""
