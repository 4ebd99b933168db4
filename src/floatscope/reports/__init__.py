"""Reports: charts as plain values, drawn on one offline page and, with the same numbers, by matplotlib."""
