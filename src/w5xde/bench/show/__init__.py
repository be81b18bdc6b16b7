"""Shows results: tables, figures with units, plots. Measures nothing."""
