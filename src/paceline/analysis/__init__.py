"""Studies of expert loads: balance figures and the emulated timing of devices."""
