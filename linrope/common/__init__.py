"""Files and checks that all other packages use."""
