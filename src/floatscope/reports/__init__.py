"""The report: charts as plain values, drawn on one offline page and, the same numbers, by matplotlib."""
