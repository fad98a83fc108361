"""The doors of the server: from a wire to submissions, from verdicts back to it. So far: who comes."""
