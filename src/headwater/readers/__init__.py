"""Reader groups: many readers, in any number of processes, that divide the segments of streams among them."""
