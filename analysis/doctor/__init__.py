"""The doctor: is the set-up fit for a long run, and why do engine and trainer disagree? See docs/how_to/doctor.md."""
