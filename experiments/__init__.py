"""Training, evaluation, data and reports around the `fpr` library."""
