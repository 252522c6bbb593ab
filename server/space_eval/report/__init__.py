"""Tables, records and plots shared by all evaluation reports."""
