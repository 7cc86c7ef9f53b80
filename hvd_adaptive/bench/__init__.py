"""Measurements of ``hvd-adaptive bench``: codecs on this processor, exchanges over the present link."""
