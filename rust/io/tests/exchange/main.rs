//! The exchange, driven without IO: each transition, every split of the same bytes, and a slow reader beside it.

mod drive;
mod ends;
mod limits;
mod memory;
mod pipelined;
mod scripts;
mod sending;
mod splits;
mod streams;
mod tokens;
mod twin;
