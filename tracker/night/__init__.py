"""The nightly run: start `tritonbench`, and keep record files so that an interrupted run can continue."""
