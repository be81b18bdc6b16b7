"""Parts of the view: terminals that change their size, notebooks, logs, and nodes grouped by machine."""
