"""Parts of the settings: which command has which, and values that have a form of their own."""
