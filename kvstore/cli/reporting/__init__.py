"""What was found, for people and for programs: reports, tables, pictures, pages."""
