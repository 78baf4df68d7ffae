"""Views of one photograph: sampling homographies, rendering, changes of light and camera. Pictures of buildings too."""
