"""The application: classification with many labels from sparse text. Reader, model, trainer, metrics."""
