"""Is a log what it says it is? What is checked, whatever database it lies in."""
