"""The fit of a calibration on labelled documents: what ``aftexport calibrate`` does."""
