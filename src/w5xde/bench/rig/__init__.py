"""The rig of slow links: hosts in network namespaces, and contestants that train one model over them."""
