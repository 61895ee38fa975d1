//! A calendar under crowds, no-shows, jumps of the clock and restarts.
