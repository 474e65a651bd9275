//! The modules of the core form layers: no two of them need each other, directly or through others.

mod layers;

use layers::{ROOT, check_layers, cycle, graph};

#[test]
fn no_module_needs_itself_through_others() {
    let graph = check_layers();
    assert!(graph.len() > 20 && graph["parser"].contains("sglang"), "the sources were not read: {graph:#?}");
}

#[test]
fn a_circle_is_found_and_named() {
    let source = |name: &str, text: &str| (name.to_owned(), text.to_owned());
    let sources = [
        source(ROOT, "mod a;\nmod b;\nmod c;\npub use c::C;\n"),
        source("a", "use crate::b::{B, inner::{self, Deep}};\n"),
        source("b", "mod inner;\n// use crate::a::A;\n"),
        source("b::inner", "fn f() -> &'static str { crate::c::name() } // not crate::a\n"),
        source("c", "fn f() {}\n"),
    ];
    assert_eq!(cycle(&graph(&sources)), None);
    let [root, a, b, inner, _] = sources;
    let closing = source("c", "use crate::a::A;\n");
    let names = ["a", "b::inner", "c", "a"].map(str::to_owned);
    let found = cycle(&graph(&[root.clone(), a.clone(), b.clone(), inner.clone(), closing]));
    assert!(found.is_some_and(|cycle| names.iter().all(|name| cycle.contains(name))), "through a nested use");
    let through_root = source("c", "fn f(value: crate::C) {}\n");
    assert!(cycle(&graph(&[root, a, b, inner, through_root])).is_some(), "through a re-export of the root");
}
